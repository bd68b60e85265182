"""What the volume holds: an ordered map in immutable tables, and a log of what came since."""
