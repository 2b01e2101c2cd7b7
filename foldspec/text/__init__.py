"""Text in and out: the tokenizer, sandboxed chat templates, and text that streams without ever being taken back."""
