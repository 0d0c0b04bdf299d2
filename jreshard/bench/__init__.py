"""Measures what moves weights between two devices; `python -m jreshard bench` is its command."""
