"""Requests to a server at a rate of our choosing, and how long it took over them."""
