//! See `tests/`: our host against our target, over loopback. Host and target never depend on each other, so this crate exists.
