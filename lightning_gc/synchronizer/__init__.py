"""Synchronise one worker's gradients, without Lightning."""
