"""Decoder, layers and families."""
