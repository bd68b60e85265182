//! Discovery from several places, and on from there: what each controller's log refers to is asked, too.
//!
//! Two controllers may refer to each other (a pair that knows of its partner does), so a controller is asked once: by
//! address and port. How far it goes from where it began, how many are asked, and how long it takes altogether have
//! bounds, since every list of ours is another's to write. A referral that does not answer is reported, and the rest goes
//! on; only when nothing that the caller named answers is the whole a failure.

use crate::discovery::discover;
use crate::options::{DiscoverOptions, Portal};
use headrace_transfer::{ErrorKind, IoError};
use serde_json::{json, Value};
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Referrals of referrals.
const DEPTH_MAX: usize = 8;
/// Controllers that are asked.
const CONTROLLERS_MAX: usize = 64;
/// Records that are kept of all of them.
const RECORDS_MAX: usize = 16 * 1024;
/// All together, in times of `connect_timeout`.
const TIMES_MAX: u32 = 6;

/// Where to begin, and as whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyOptions {
    pub starts: Vec<Portal>,
    /// Ask what is referred to, too.
    pub referrals: bool,
    /// Its host and port are not looked at.
    pub each: DiscoverOptions,
}

struct Visit {
    portal: Portal,
    depth: usize,
    via: Option<String>,
}

/// What all of them offer:
/// `{"controllers": [{address, generation, via}], "records": [{..., "controller"}], "failures": [{address, via, error}]}`.
pub fn survey(options: &SurveyOptions) -> Result<Value, IoError> {
    if options.starts.is_empty() || options.starts.len() > CONTROLLERS_MAX {
        return Err(
            IoError::new(ErrorKind::Usage, "nowhere to ask, or too many places")
                .expected(format!("1 to {CONTROLLERS_MAX}"))
                .found(options.starts.len().to_string()),
        );
    }
    let until = Instant::now() + options.each.connect_timeout * TIMES_MAX;
    let mut seen = HashSet::new();
    let mut known = HashSet::new();
    let mut next: VecDeque<Visit> = VecDeque::new();
    for portal in &options.starts {
        if seen.insert(portal.clone()) {
            next.push_back(Visit {
                portal: portal.clone(),
                depth: 0,
                via: None,
            });
        }
    }
    let (mut controllers, mut records, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    let mut first_error = None;
    let mut answered = false;
    let mut asked = 0;
    while let Some(visit) = next.pop_front() {
        let address = visit.portal.to_string();
        let mut fail = |error: String| {
            failures.push(json!({ "address": address, "via": visit.via, "error": error }));
        };
        let left = until.saturating_duration_since(Instant::now());
        if asked == CONTROLLERS_MAX {
            fail(format!(
                "not asked: {CONTROLLERS_MAX} discovery controllers are enough"
            ));
            continue;
        }
        if visit.depth > 0 && left.is_zero() {
            fail("not asked: the others took all the time there was".into());
            continue;
        }
        asked += 1;
        let each = DiscoverOptions {
            host: visit.portal.host.clone(),
            port: visit.portal.port,
            connect_timeout: match visit.depth {
                0 => options.each.connect_timeout,
                _ => options
                    .each
                    .connect_timeout
                    .min(left)
                    .max(Duration::from_millis(1)),
            },
            ..options.each.clone()
        };
        let log = match discover(each) {
            Ok(log) => log,
            Err(error) => {
                fail(error.to_string());
                if visit.depth == 0 {
                    first_error.get_or_insert(error);
                }
                continue;
            }
        };
        answered |= visit.depth == 0;
        controllers.push(json!({ "address": address, "generation": log["generation"], "via": visit.via }));
        for record in log["records"].as_array().into_iter().flatten() {
            let text = |name: &str| record[name].as_str().unwrap_or_default().to_string();
            if text("subtype") == "referral" && text("trtype") == "tcp" && options.referrals {
                let portal = Portal::new(text("traddr"), text("trsvcid").parse().unwrap_or_default());
                if let Some(problem) = record["problem"].as_str() {
                    failures.push(json!({
                        "address": portal.to_string(),
                        "via": address,
                        "error": format!("not asked: {problem}"),
                    }));
                } else if !seen.contains(&portal) && visit.depth + 1 > DEPTH_MAX {
                    failures.push(json!({
                        "address": portal.to_string(),
                        "via": address,
                        "error": format!("not asked: referred to {DEPTH_MAX} times already"),
                    }));
                } else if seen.len() < 2 * CONTROLLERS_MAX && seen.insert(portal.clone()) {
                    next.push_back(Visit {
                        portal,
                        depth: visit.depth + 1,
                        via: Some(address.clone()),
                    });
                }
            }
            if records.len() < RECORDS_MAX {
                keep(&mut records, &mut known, record, &address);
            }
        }
    }
    match first_error {
        Some(error) if !answered => Err(error),
        _ => Ok(json!({ "controllers": controllers, "records": records, "failures": failures })),
    }
}

/// Keep a record, once: several controllers of one site say the same.
fn keep(records: &mut Vec<Value>, known: &mut HashSet<String>, record: &Value, controller: &str) {
    let key = ["trtype", "subtype", "traddr", "trsvcid", "subnqn"].map(|name| record[name].to_string());
    if known.insert(key.join(" ")) {
        let mut record = record.clone();
        record["controller"] = controller.into();
        records.push(record);
    }
}

#[cfg(test)]
mod tests {
    use crate::discovery::trouble;

    #[test]
    fn what_is_wrong_with_an_entry_is_said() {
        let ok = |traddr: &str, trsvcid: &str| trouble("tcp", traddr, trsvcid, "nqn.a", 0);
        assert_eq!(ok("10.0.0.1", "4420"), None);
        assert_eq!(ok("fe80::1", "8009"), None);
        assert_eq!(ok("storage-1.example", "8009"), None);
        for traddr in ["0.0.0.0", "::", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"] {
            assert!(
                ok(traddr, "4420").is_some_and(|why| why.contains("wildcard") && why.contains(traddr)),
                "{traddr}"
            );
        }
        for traddr in ["", "a b", "a/b", "\u{fffd}", "10.0.0.1:4420", "-x"] {
            assert!(ok(traddr, "4420").is_some(), "{traddr:?}");
        }
        for port in ["", "0", "65536", "44 20", "none", "+4420"] {
            assert!(
                ok("10.0.0.1", port).is_some_and(|why| why.contains("port")),
                "{port:?}"
            );
        }
        assert!(trouble("tcp", "10.0.0.1", "4420", "", 0).is_some());
        assert!(trouble("tcp", "10.0.0.1", "4420", "nqn.a", 1).is_some_and(|why| why.contains("TLS")));
        assert_eq!(trouble("tcp", "10.0.0.1", "4420", "nqn.a", 2), None);
        // Other transports have addresses of other kinds.
        assert_eq!(trouble("fc", "nn-0x10:pn-0x20", "none", "nqn.a", 0), None);
    }
}
