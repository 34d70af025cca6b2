"""Attach gradient compression to a model outside Lightning: plain torch, Fabric, FSDP2."""
