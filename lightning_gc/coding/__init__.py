"""Codes for payloads: bits packed into bytes, Elias-Fano positions, validation of what arrives."""
