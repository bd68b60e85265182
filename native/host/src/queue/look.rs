//! What is under way, for whoever asks.

use super::QueuePair;

impl<T> QueuePair<T> {
    /// Of every command that is under way, in no order.
    pub fn tags(&self) -> impl Iterator<Item = &T> {
        self.commands.iter().flatten().map(|command| &command.tag)
    }
}
