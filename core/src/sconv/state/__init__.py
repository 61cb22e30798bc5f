"""What is kept per request: its shape, its memory, its slots and the windows of a verify step."""
