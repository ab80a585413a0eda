"""An HTTP server for models with OpenAI-compatible endpoints and a chat page, used by `tricycle serve`."""
