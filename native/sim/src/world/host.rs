//! The small host: how its association comes up, is lost, and carries commands.

use super::*;

impl World {
    /// Close the connections, count, and let what was under way wait.
    pub(super) fn lose(&mut self) {
        let Some(association) = self.association.take() else {
            return;
        };
        for mut link in self.links.drain(..) {
            if !self.rules.late {
                self.bench.hang_up(link.peer);
                continue;
            }
            link.queue = None;
            link.fin = true;
            self.zombies.push(link);
        }
        if association.step == Step::Ready {
            self.counts.losses += 1;
        }
        for (tag, one) in association.under_way {
            if let Request::Write { region, .. } = one.request {
                self.regions[region].haunted = Some(self.life);
            }
            self.waiting.push((tag, one.request));
        }
        self.begin_at = self.now + self.random.below(300) as u64;
    }

    pub(super) fn open_link(&mut self, depth: u16, digests: Digests, in_capsule: usize) {
        let hpda = self.random.pick(&[0, 0, 1]);
        self.links.push(Link {
            queue: Some(Queue::new(depth, digests, (hpda, 0), in_capsule)),
            peer: self.bench.accept(),
            to_target: Pipe::default(),
            to_host: Pipe::default(),
            fin: false,
        });
    }

    /// What is due on the way up, and commands that wait.
    pub(super) fn drive(&mut self) {
        let now = self.now;
        let Some(association) = &mut self.association else {
            if now >= self.begin_at {
                let digests = Digests {
                    header: self.random.one_in(2),
                    data: self.random.one_in(2),
                };
                self.association = Some(Association {
                    step: Step::Initialise,
                    cntlid: CNTLID_DYNAMIC,
                    awaited: 0,
                    digests,
                    in_capsule: self.random.pick(&[0, 4096, 16384]),
                    deadline: now + 2 * COMMAND_TIMEOUT,
                    keep_alive_at: u64::MAX,
                    kept_alive_by: None,
                    under_way: BTreeMap::new(),
                });
                self.open_link(31, digests, 8192);
            }
            return;
        };
        let overdue = association.step != Step::Ready && now > association.deadline
            || association.kept_alive_by.is_some_and(|by| now > by)
            || association.under_way.values().any(|one| now > one.deadline);
        if overdue {
            return self.lose();
        }
        let agreed = self
            .links
            .iter()
            .all(|link| link.queue.as_ref().is_some_and(Queue::is_agreed));
        match association.step {
            Step::Initialise if agreed => {
                association.step = Step::Connect;
                self.connect(0);
            }
            Step::InitialiseIo if agreed => {
                association.step = Step::ConnectIo;
                association.awaited = IO_QUEUES;
                (1..=IO_QUEUES).for_each(|qid| self.connect(qid));
            }
            Step::Ready => {
                if now >= association.keep_alive_at {
                    association.keep_alive_at = now + KEEP_ALIVE / 2;
                    association.kept_alive_by.get_or_insert(now + KEEP_ALIVE);
                    let sqe = Sqe::new(admin::KEEP_ALIVE, 0, 0);
                    if let Some(queue) = &mut self.links[0].queue {
                        queue.submit(sqe, Payload::None, 0, later());
                    }
                }
                self.send_waiting();
            }
            _ => {}
        }
    }

    pub(super) fn connect(&mut self, qid: usize) {
        let Some(association) = &self.association else {
            return;
        };
        let connect = Connect {
            recfmt: 0,
            qid: qid as u16,
            sqsize: 31,
            cattr: CATTR_NO_SQ_FLOW,
            kato_ms: if qid == 0 { KEEP_ALIVE as u32 } else { 0 },
        };
        let data = ConnectData {
            hostid: [7; 16],
            cntlid: association.cntlid,
            subnqn: NQN.into(),
            hostnqn: HOST.into(),
        };
        let payload = Payload::Write(Buffer::from_vec(data.encode().to_vec()));
        if let Some(queue) = &mut self.links[qid].queue {
            queue.submit(connect.encode(0), payload, 0, later());
        }
    }

    pub(super) fn send_waiting(&mut self) {
        let Some(association) = &mut self.association else {
            return;
        };
        while !self.waiting.is_empty() {
            let at = 1 + self.random.below(IO_QUEUES);
            let Some(queue) = &mut self.links[at].queue else {
                return;
            };
            if queue.room() < 8 {
                return;
            }
            // In any order: nothing that waits together depends on each other.
            let nth = self.random.below(self.waiting.len());
            let (tag, request) = self.waiting.swap_remove(nth);
            let rw = |opcode, region: usize| {
                Sqe::rw(
                    opcode,
                    0,
                    1,
                    (region * REGION_BLOCKS) as u64,
                    REGION_BLOCKS as u32,
                )
            };
            let (sqe, payload, memory) = match request {
                Request::Write { region, version, fua } => {
                    let sqe = rw(io::WRITE, region);
                    let sqe = sqe.with_cdw(12, sqe.cdw(12) | if fua { CDW12_FUA } else { 0 });
                    let buffer = Buffer::from_vec(content(region, version));
                    (sqe, Payload::Write(buffer), None)
                }
                Request::Read { region, .. } => {
                    let buffer = Buffer::zeroed(REGION);
                    (rw(io::READ, region), Payload::Read(buffer.clone()), Some(buffer))
                }
                Request::Flush => (Sqe::new(io::FLUSH, 0, 1), Payload::None, None),
            };
            queue.submit(sqe, payload, tag, later());
            association.under_way.insert(
                tag,
                UnderWay {
                    request,
                    memory,
                    deadline: self.now + COMMAND_TIMEOUT,
                },
            );
        }
    }

    pub(super) fn complete(&mut self) -> Result<(), Broken> {
        for at in 0..self.links.len() {
            while let Some(queue) = self.links.get_mut(at).and_then(|link| link.queue.as_mut()) {
                let Some((tag, ended)) = queue.completion() else {
                    break;
                };
                let Ended::Answer(cqe) = ended else {
                    return Err(format!("a command ended with {ended:?}"));
                };
                if tag == 0 {
                    if cqe.status.is_success() {
                        self.came_up(at, cqe.dw0);
                    } else {
                        // Busy, or an association that the target has ended: again, later.
                        self.lose();
                    }
                    continue;
                }
                if !cqe.status.is_success() {
                    return Err(format!("a command ended with {}", cqe.status));
                }
                let under_way = self.association.as_mut().and_then(|a| a.under_way.remove(&tag));
                let Some(one) = under_way else {
                    return Err(format!("request {tag} ends twice"));
                };
                self.ended(&one)?;
            }
        }
        Ok(())
    }

    pub(super) fn came_up(&mut self, at: usize, dw0: u32) {
        let Some(association) = &mut self.association else {
            return;
        };
        match association.step {
            Step::Connect => {
                association.cntlid = dw0 as u16;
                association.step = Step::Enable;
                let enable = property_set(0, 0x14, u64::from(CC_ENABLE), false);
                if let Some(queue) = &mut self.links[0].queue {
                    queue.submit(enable, Payload::None, 0, later());
                }
            }
            Step::Enable => {
                association.step = Step::InitialiseIo;
                let (digests, in_capsule) = (association.digests, association.in_capsule);
                for _ in 0..IO_QUEUES {
                    self.open_link(31, digests, in_capsule.max(1024));
                }
            }
            Step::ConnectIo => {
                association.awaited -= 1;
                if let Some(queue) = &mut self.links[at].queue {
                    queue.set_in_capsule(association.in_capsule);
                }
                if association.awaited == 0 {
                    association.step = Step::Ready;
                    association.keep_alive_at = self.now + KEEP_ALIVE / 2;
                }
            }
            Step::Ready => association.kept_alive_by = None,
            Step::Initialise | Step::InitialiseIo => {}
        }
    }
}
