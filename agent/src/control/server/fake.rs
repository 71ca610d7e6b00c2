//! A backend for tests, here and of the commands: it answers at once and remembers what it was
//! asked.

use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Semaphore, broadcast};

use crate::control::{
    Answer, Backend, Caller, EventFeed, Manual,
    api::{
        ApiError, ConfigAction, ConfigView, DoctorReport, Event, EventRecord, Explanation,
        Handover, Health, ManualResult, PauseResult, Paused, Peer, ReloadResult, StatusEnvelope,
        Timestamp, Window, tests as api_tests,
    },
};

/// Answers at once and notes what it was asked.
pub(crate) struct Fake {
    asked: Mutex<Vec<String>>,
    /// The page of metrics.
    pub(crate) page: Mutex<String>,
    /// Rows of the whole status, beside the two that are always there.
    pub(crate) rows: AtomicUsize,
    /// Answers to the whole status and to metrics wait for one of these each.
    pub(crate) go: Arc<Semaphore>,
    pub(crate) health: Mutex<Health>,
    /// What doctor finds.
    pub(crate) report: Mutex<DoctorReport>,
    pub(crate) kept: Mutex<Vec<Arc<EventRecord>>>,
    pub(crate) publisher: broadcast::Sender<Arc<EventRecord>>,
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            asked: Mutex::default(),
            page: Mutex::new("# HELP x y\n".to_owned()),
            rows: AtomicUsize::new(0),
            go: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
            health: Mutex::new(Health {
                alive: true,
                ready: true,
                reason: "enforcing".to_owned(),
            }),
            report: Mutex::new(api_tests::doctor_report()),
            kept: Mutex::default(),
            publisher: broadcast::channel(16).0,
        })
    }

    fn note(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }

    fn when_told<T: Send + 'static>(&self, answer: T) -> Answer<T> {
        let go = Arc::clone(&self.go);
        Box::pin(async move {
            go.acquire().await.unwrap().forget();
            Ok(answer)
        })
    }

    pub(crate) fn asked(&self) -> MutexGuard<'_, Vec<String>> {
        self.asked.lock().unwrap()
    }
}

fn ready<T: Send + 'static>(result: Result<T, ApiError>) -> Answer<T> {
    Box::pin(std::future::ready(result))
}

impl Backend for Fake {
    fn status(&self, destination: Option<String>) -> Answer<StatusEnvelope> {
        self.note(format!("status {destination:?}"));
        let mut worse = api_tests::row("10.0.0.9:80");
        worse.failures.refused = 3;
        ready(match destination.as_deref() {
            None => {
                let mut rows = vec![api_tests::row("10.0.0.5:5432"), worse];
                let more = self.rows.load(Ordering::Relaxed);
                rows.resize(rows.len() + more, api_tests::row("10.0.0.5:5432"));
                return self.when_told(api_tests::envelope(rows));
            }
            Some("10.0.0.5:5432") => Ok(api_tests::envelope(vec![api_tests::row("10.0.0.5:5432")])),
            Some("nonsense") => Err(ApiError::BadRequest("nonsense: no port".to_owned())),
            Some("hang:1") => return Box::pin(std::future::pending()),
            Some(_) => Ok(api_tests::envelope(Vec::new())),
        })
    }

    fn explain(&self, destination: String, caller: Caller) -> Answer<Explanation> {
        self.note(format!("explain {destination} {caller:?}"));
        ready(match (destination.as_str(), &caller) {
            ("nonsense", _) => Err(ApiError::BadRequest("nonsense: no port".to_owned())),
            (_, Caller::Process(4_000_000)) => {
                Err(ApiError::NotFound("there is no process 4000000".to_owned()))
            }
            (_, Caller::Workload(workload)) => {
                Ok(api_tests::explanation(&destination, Some(workload)))
            }
            _ => Ok(api_tests::explanation(&destination, None)),
        })
    }

    fn manual(
        &self,
        destination: String,
        workload: Option<String>,
        action: Manual,
        by: Peer,
    ) -> Answer<ManualResult> {
        assert_eq!(by.uid, rustix::process::getuid().as_raw());
        assert_eq!(by.pid, Some(std::process::id() as i32));
        self.note(format!("{destination} {workload:?} {action:?}"));
        ready(if destination == "10.0.0.53:53" {
            Err(ApiError::Conflict("10.0.0.53:53 is protected".to_owned()))
        } else {
            Ok(ManualResult {
                rows: 2,
                taken_back: u64::from(action == Manual::Reset),
                closed_already: 0,
                left: Vec::new(),
            })
        })
    }

    fn pause(&self, duration: Option<Duration>, by: Peer) -> Answer<PauseResult> {
        self.note(format!("pause {duration:?}"));
        ready(Ok(PauseResult {
            paused: Some(Paused {
                since: Timestamp::from_unix_ms(0),
                until: None,
                by: by.to_string(),
            }),
            ended: None,
        }))
    }

    fn resume(&self, _: Peer) -> Answer<PauseResult> {
        self.note("resume".to_owned());
        ready(Ok(PauseResult {
            paused: None,
            ended: None,
        }))
    }

    fn reload(&self, _: Peer) -> Answer<ReloadResult> {
        self.note("reload".to_owned());
        ready(Err(ApiError::BadRequest("backstop.toml:3: no".to_owned())))
    }

    fn hand_over(&self, by: Peer) -> Answer<Handover> {
        self.note(format!("hand over to {by}"));
        ready(Ok(Handover {
            version: "0.1.0".to_owned(),
            pid: 7,
            state: serde_json::Value::Null,
            paused: None,
        }))
    }

    fn end_handover(&self, _: Peer) -> Answer<()> {
        ready(Err(ApiError::Conflict("not begun".to_owned())))
    }

    fn config(&self) -> Answer<ConfigView> {
        ready(Ok(ConfigView {
            file: None,
            toml: "mode = \"enforce\"\n".to_owned(),
            warnings: vec!["w".to_owned()],
        }))
    }

    fn doctor(&self) -> Answer<DoctorReport> {
        self.note("doctor".to_owned());
        ready(Ok(self.report.lock().unwrap().clone()))
    }

    fn events(&self, all: bool) -> EventFeed {
        self.note(format!("events {all}"));
        EventFeed {
            kept: self.kept.lock().unwrap().clone(),
            coming: self.publisher.subscribe(),
        }
    }

    fn metrics(&self) -> Answer<String> {
        self.note("metrics".to_owned());
        self.when_told(self.page.lock().unwrap().clone())
    }

    fn health(&self) -> Health {
        self.health.lock().unwrap().clone()
    }
}

pub(crate) fn started(message: &str) -> Arc<EventRecord> {
    Arc::new(EventRecord {
        time: Timestamp::from_unix_ms(0),
        event: Event::Config {
            action: ConfigAction::Started,
            message: message.to_owned(),
            by: None,
        },
    })
}

pub(crate) fn failure() -> Arc<EventRecord> {
    Arc::new(EventRecord {
        time: Timestamp::from_unix_ms(0),
        event: Event::Failure {
            destination: "d".to_owned(),
            workload: "w".to_owned(),
            netns: None,
            window: Window::Connects,
            outcome: "refused".to_owned(),
            seq: 1,
            previous_call_time: None,
            generation: 0,
            latency_us: 1,
        },
    })
}
