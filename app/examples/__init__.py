"""Agents that are ready to run: assistants of `react`, and one graph of its own loaded from `langgraph.json`."""
