"""The demonstration: conversations over one system prompt, each request cold and with reuse, all checked."""
