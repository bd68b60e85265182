//! What a controller told by itself, and what follows for the device.

use super::Core;
use crate::association::{Association, Event};
use headrace_transfer::{ErrorKind, IoError};
use std::sync::atomic::Ordering;

impl Core {
    /// `Err`: this namespace is not the one that was opened any more.
    pub(super) fn heed(&mut self, association: &mut Association) -> Result<(), IoError> {
        for event in association.take_events() {
            let noted = match event {
                Event::NamespaceChanged(facts) => {
                    if let Some(difference) = self.facts.differs(&facts) {
                        return Err(IoError::new(ErrorKind::Gone, "the namespace was replaced")
                            .at(&self.shared.place)
                            .expected("the namespace that was opened")
                            .found(difference)
                            .next("open the device again if the change was meant"));
                    }
                    let noted = format!(
                        "the namespace changed: {} bytes before, {} now",
                        self.facts.size_bytes, facts.size_bytes
                    );
                    self.facts = *facts;
                    self.shared
                        .size_bytes
                        .store(self.facts.size_bytes, Ordering::Relaxed);
                    self.shared.status().facts = self.facts.clone();
                    noted
                }
                Event::NamespaceGone(error) => {
                    return Err(IoError {
                        kind: ErrorKind::Gone,
                        ..error
                    })
                }
                Event::AnaChanged(ana) => {
                    self.shared.status().facts.ana = Some(ana);
                    let state = ana.state.map_or("unknown", |state| state.name());
                    format!("ANA group {} is {state}", ana.group)
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
        Ok(())
    }
}
