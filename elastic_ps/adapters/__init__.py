"""Models of which only a small part is trained: their frozen base, and adapters in PEFT's format."""
