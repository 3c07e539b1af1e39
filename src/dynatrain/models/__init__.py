"""Torch modules built from a catalogue, keyed initial weights and keyed dropout."""
