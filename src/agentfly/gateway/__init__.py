"""An OpenAI-compatible endpoint in front of a policy, which makes any agent program trainable as it stands."""
