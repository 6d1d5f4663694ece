"""Keyturn: an HTTP agent service with persistent threads and an interrupt inbox."""

from __future__ import annotations

__version__ = "0.1.0"
