"""Requests, scheduling, pages, sampling and text."""
