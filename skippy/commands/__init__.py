"""What the command `skippy` can do: a module per command, the logic of `chat` apart from its terminal."""
