//! Reads that their owner takes back before they are answered, to have them answered elsewhere.

use super::{Data, QueuePair};
use headrace_transfer::Buffer;

impl<T> QueuePair<T> {
    /// The tag and the data of every read under way for which `retagged` has another tag; the data may be used at once. What
    /// still comes for such a read goes to memory that nobody looks at, and its answer, with that other tag, to the
    /// completions. It keeps its slot and its deadline until then.
    pub fn recall(&mut self, retagged: impl Fn(&T) -> Option<T>) -> Vec<(T, Data)> {
        let mut recalled = Vec::new();
        for command in self.commands.iter_mut().flatten() {
            let (Data::Read(buffer), Some(tag)) = (&command.data, retagged(&command.tag)) else {
                continue;
            };
            let nobodys = Data::Read(Buffer::zeroed(buffer.len()));
            recalled.push((
                std::mem::replace(&mut command.tag, tag),
                std::mem::replace(&mut command.data, nobodys),
            ));
        }
        recalled
    }
}
