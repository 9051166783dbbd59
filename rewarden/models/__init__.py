"""Loading, adapting, running and saving language models, reward models and critics."""
