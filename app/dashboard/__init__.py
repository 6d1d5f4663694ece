"""The inbox page. It uses the public API only."""
