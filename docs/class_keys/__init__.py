"""The keys of config.json that change what the classes of transformers compute."""
