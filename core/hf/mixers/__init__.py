"""The forwards of mixers that mambaslots puts in the place of transformers' own, one file a kind of state."""
