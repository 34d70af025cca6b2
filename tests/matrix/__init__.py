"""The versions of Python, torch and Lightning that are supported, tried one by one."""
