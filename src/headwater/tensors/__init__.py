"""Headwater: tensors."""
