"""Tensors on the wire and in the blob store."""
