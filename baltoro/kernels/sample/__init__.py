"""Drawing one id per row from logits: cut the unlikely, draw by a given number, score what was drawn."""
