"""Carries plans out: compiled programs, the native core, and the processes that take part."""
