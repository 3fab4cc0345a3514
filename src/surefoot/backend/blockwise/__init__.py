"""Attention in batched products over aligned blocks of keys; shared by devices that run torch."""
