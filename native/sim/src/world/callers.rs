//! The host's callers: who writes and reads, and what must be there.

use super::*;

impl World {
    pub(super) fn ask(&mut self, request: Request) {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.waiting.push((tag, request));
    }

    /// Begin what there is to do.
    pub(super) fn want(&mut self) {
        let idle: Vec<usize> = (0..REGIONS)
            .filter(|&region| self.regions[region].next.is_none())
            .collect();
        if self.reads < 6 && !idle.is_empty() && self.random.one_in(8) {
            let region = self.random.pick(&idle);
            self.reads += 1;
            let version = self.regions[region].durable;
            self.ask(Request::Read { region, version });
        }
        if self.batch.is_some() || !self.random.one_in(4) {
            return;
        }
        for region in &mut self.regions {
            // The target that a command was sent to is no more, and the command with it.
            region.haunted = region.haunted.filter(|&life| life == self.life);
        }
        let quarantine = self.rules.quarantine;
        let mut free: Vec<usize> = idle
            .into_iter()
            .filter(|&region| !quarantine || self.regions[region].haunted.is_none())
            .collect();
        let wanted = self.random.range(1..=6);
        let mut regions = Vec::new();
        while regions.len() < wanted && !free.is_empty() {
            let haunted = free
                .iter()
                .position(|&region| self.regions[region].haunted.is_some());
            // Without the rule, straight into the trap.
            let nth = haunted.unwrap_or_else(|| self.random.below(free.len()));
            regions.push(free.swap_remove(nth));
        }
        if regions.is_empty() {
            // Everything is in quarantine. The target's end is one way to know that nothing old lives.
            if self.random.one_in(200) {
                self.power_fails();
            }
            return;
        }
        self.version += 1;
        for &region in &regions {
            self.regions[region].next = Some(self.version);
            self.regions[region].haunted = None;
        }
        let fua = self.random.one_in(5);
        self.batch = Some(Batch {
            left: 0,
            regions,
            losses: 0,
            flushing: false,
            fua,
        });
        self.write_batch();
    }

    pub(super) fn write_batch(&mut self) {
        let Some(batch) = &mut self.batch else { return };
        batch.losses = self.counts.losses;
        batch.flushing = false;
        batch.left = batch.regions.len();
        let fua = batch.fua;
        for region in batch.regions.clone() {
            let version = self.regions[region].next.unwrap_or_default();
            self.ask(Request::Write { region, version, fua });
        }
    }

    pub(super) fn ended(&mut self, one: &UnderWay) -> Result<(), Broken> {
        match one.request {
            Request::Write { .. } => {
                self.counts.writes += 1;
                let Some(batch) = &mut self.batch else {
                    return Err("a write that nobody waits for".into());
                };
                batch.left -= 1;
                if batch.left == 0 {
                    if batch.fua {
                        // Durable when answered, whatever happened meanwhile.
                        self.batch_is_durable();
                    } else {
                        batch.flushing = true;
                        self.ask(Request::Flush);
                    }
                }
            }
            Request::Flush => {
                let same = self
                    .batch
                    .as_ref()
                    .is_some_and(|batch| batch.losses == self.counts.losses);
                if same || !self.rules.loss_counter {
                    self.batch_is_durable();
                } else {
                    self.counts.repeated += 1;
                    self.write_batch();
                }
            }
            Request::Read { region, version } => {
                self.reads -= 1;
                self.counts.reads += 1;
                let state = &self.regions[region];
                // Written meanwhile: it may be either.
                if state.durable == version && state.next.is_none() {
                    let mut bytes = vec![0; REGION];
                    if let Some(memory) = &one.memory {
                        memory.copy_to(0, &mut bytes);
                    }
                    self.check(region, &bytes)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn batch_is_durable(&mut self) {
        let Some(batch) = self.batch.take() else { return };
        for region in batch.regions {
            if let Some(version) = self.regions[region].next.take() {
                self.regions[region].durable = version;
                self.counts.durable += 1;
            }
        }
    }

    pub(super) fn check(&self, region: usize, bytes: &[u8]) -> Result<(), Broken> {
        let expected = content(region, self.regions[region].durable);
        for (n, (found, right)) in bytes.chunks(BLOCK).zip(expected.chunks(BLOCK)).enumerate() {
            if found != right {
                let word = |block: &[u8]| u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                return Err(format!(
                    "at {} ms block {n} of region {region} holds version {}, durable is {} (losses {}, losses of power {})",
                    self.now,
                    word(found) >> 8,
                    word(right) >> 8,
                    self.counts.losses,
                    self.counts.power_losses
                ));
            }
        }
        Ok(())
    }

    /// What rests on the medium.
    pub(super) fn check_all(&mut self) -> Result<(), Broken> {
        if let Medium::Cached(disk) = &self.medium {
            disk.power_fails(&mut self.random);
        }
        for region in 0..REGIONS {
            let mut bytes = vec![0; REGION];
            let offset = (region * REGION) as u64;
            match &self.medium {
                Medium::Cached(disk) => disk.read(offset, &mut bytes),
                Medium::Mapped(memory) => memory.read(offset, &mut bytes),
            }
            .map_err(|error| error.to_string())?;
            self.check(region, &bytes)?;
        }
        Ok(())
    }
}
