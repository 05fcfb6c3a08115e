"""OpenAI-compatible HTTP; talks to any Worker, never sees a tensor."""
