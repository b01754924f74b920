"""kvalet: parallel chats share one llama-server without killing each other."""

__version__ = "0.1.0"

__all__ = ["__version__"]
