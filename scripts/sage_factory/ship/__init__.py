"""Shipping: into dist/, to a release, a channel, pip's indexes; and built again from there."""
