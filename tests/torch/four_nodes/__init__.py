"""Four nodes that share no files train from two targets, of which one loses its link and one is stopped under way."""
