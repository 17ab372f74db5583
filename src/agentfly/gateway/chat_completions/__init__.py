"""OpenAI's chat completions, the API that most agent programs speak: requests read, answers written."""
