"""Prefix reuse for llama.cpp in Python."""
