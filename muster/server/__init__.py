"""The OpenAI server."""
