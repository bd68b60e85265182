//! What a controller told by itself, and what follows for its path and the device.

use super::path::Phase;
use super::Core;
use crate::association::{Event, Failure};
use crate::facts::Facts;
use crate::reactor::Turn;
use headrace_transfer::{ErrorKind, IoError};
use std::sync::atomic::Ordering;

impl Core {
    /// `true`: others may go on with what this path had under way, since it has just ended.
    pub(super) fn heed(&mut self, at: usize, turn: &Turn<'_>) -> bool {
        let Phase::Ready(association) = &mut self.paths[at].phase else {
            return false;
        };
        for event in association.take_events() {
            let noted = match event {
                Event::NamespaceChanged(facts) => match self.namespace_changed(at, &facts) {
                    Ok(noted) => noted,
                    Err(error) => {
                        let again = self.lose(at, Failure::from(error.clone()), turn);
                        self.paths[at].refuse(error);
                        return self.look(turn.now) || again;
                    }
                },
                Event::NamespaceGone(error) => {
                    // It may come back: then an attempt to connect finds it.
                    let kind = ErrorKind::Gone;
                    return self.lose(at, IoError { kind, ..error }.into(), turn);
                }
                Event::AnaChanged(ana) => {
                    self.paths[at].forget_hearsay();
                    self.shared.status().facts.ana = Some(ana);
                    let state = ana.state.map_or("unknown", |state| state.name());
                    format!(
                        "ANA group {} is {state} by {}",
                        ana.group,
                        self.paths[at].portal()
                    )
                }
                Event::DiscoveryChanged => "the discovery log changed".into(),
                Event::Health(0) => "the controller's health is good again".into(),
                Event::Health(warning) => {
                    format!("the controller warns about its health: SMART 0x{warning:02x}")
                }
                Event::Noted(event) => format!(
                    "event of type {}, information 0x{:02x}, log page 0x{:02x}",
                    event.kind, event.info, event.lid
                ),
            };
            let mut status = self.shared.status();
            status.events += 1;
            status.last_event = noted;
        }
        false
    }

    /// `Err`: it is not the one that was opened any more.
    fn namespace_changed(&mut self, at: usize, facts: &Facts) -> Result<String, IoError> {
        if let Some(difference) = self.facts.differs(facts) {
            return Err(IoError::new(ErrorKind::Gone, "the namespace was replaced")
                .at(format!("{}, by {}", self.shared.place, self.paths[at].portal()))
                .expected("the namespace that was opened")
                .found(difference)
                .next("open the device again if the change was meant"));
        }
        let noted = format!(
            "the namespace changed: {} bytes before, {} now",
            self.facts.size_bytes, facts.size_bytes
        );
        self.facts = facts.clone();
        self.shared.size_bytes.store(facts.size_bytes, Ordering::Relaxed);
        self.shared.status().facts = facts.clone();
        Ok(noted)
    }
}
