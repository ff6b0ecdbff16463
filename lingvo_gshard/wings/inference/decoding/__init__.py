"""Decoding: functions of a model, lowered to programs, that choose one token after another."""
