"""Every compressor, memory and scheme as table rows, read from the declarations of the classes."""
