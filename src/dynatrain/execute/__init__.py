"""Carries a judged plan out over a transport, and digests what lies in storage."""
