"""Published models: reads and writes the directories of Hugging Face's libraries.

A family (families/) says which Params a `config.json` stands for, and where each published tensor
goes. Everything else is common: reading safetensors (shards.py), mapping tensors to weights
(weight_mapping.py), writing a run (importing.py), and the way back (exporting.py).
"""
