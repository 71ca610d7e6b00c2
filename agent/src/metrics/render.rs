//! Numbers to text.

use std::collections::BTreeMap;

use prometheus::{
    TextEncoder,
    proto::{self, LabelPair, MetricFamily, MetricType},
};

use super::{
    CONNECT_BOUNDS, Cumulative, NodeMetrics, RESPONSE_BOUNDS, RowMetrics, TIMEOUTS, cumulative,
    declared::{self, Kind, Metric, ROW_LABELS},
};
use crate::control::api::{ReasonKind, State, TimeoutKind};

/// Label sets that get series of their own; a row has some 81, or up to 93 with every timeout and limit, so that a full page is about 42 MB.
/// Rows beyond them are added up as destination `other`.
pub const SERIES_ROWS: usize = 4096;

/// Labels of what is beyond [`SERIES_ROWS`].
const OTHER: &str = "other";

/// The page could not be written.
#[derive(Debug, thiserror::Error)]
#[error("writing metrics: {0}")]
pub struct RenderError(#[from] prometheus::Error);

/// Outcomes that any row may have: always shown, so that a rate is there from the first failure on. Others
/// are shown where the policy makes them possible ([`super::Possible`]), and else with their first.
const OUTCOMES: [&str; 8] = [
    "refused",
    "connect_timeout",
    "unreachable",
    "reset",
    "closed_early",
    "gave_up",
    "status",
    "other",
];

/// A page in the Prometheus text format, 0.0.4.
///
/// # Errors
/// None is known; the encoder reserves the right.
pub fn render(node: &NodeMetrics) -> Result<String, RenderError> {
    let mut page = Page::default();
    node.rows.write(&mut page);
    page.number(declared::EVENTS_LOST, &[], &[], node.events_lost);
    page.number(declared::DESTINATIONS, &[], &[], node.destinations);
    let evicted = node.destinations_evicted;
    page.number(declared::DESTINATIONS_EVICTED, &[], &[], evicted);
    page.histogram(declared::REACTION, &[], &node.reaction);
    for (result, count) in [("ok", node.reloads_good), ("error", node.reloads_bad)] {
        page.number(declared::CONFIG_RELOADS, &[], &[result], count);
    }
    for (hook, attached) in &node.attached {
        page.number(declared::ATTACHED, &[], &[hook], u64::from(*attached));
    }
    page.number(declared::PAUSED, &[], &[], u64::from(node.paused));
    page.number(declared::BUILD_INFO, &[], &[&node.version], 1);
    page.text()
}

/// Destination, workload, policy.
type Labels = [String; 3];

/// Rows, added up where they share their labels: two equal series make a page invalid.
#[derive(Default)]
pub struct Rows {
    own: BTreeMap<Labels, Series>,
    /// What is beyond [`SERIES_ROWS`].
    rest: Option<Series>,
}

impl Rows {
    /// Adds a row.
    pub fn add(&mut self, row: &RowMetrics) {
        let labels = [&row.destination, &row.workload, &row.policy].map(Clone::clone);
        if self.own.len() < SERIES_ROWS || self.own.contains_key(&labels) {
            self.own.entry(labels).or_default().add(row);
        } else {
            let rest = self.rest.get_or_insert_default();
            rest.add(row);
            // Of many breakers there is no one state.
            rest.state = None;
        }
    }

    fn write(&self, page: &mut Page) {
        for ([destination, workload, policy], series) in &self.own {
            series.write(page, [destination, workload, policy]);
        }
        if let Some(rest) = &self.rest {
            rest.write(page, [OTHER; 3]);
        }
    }
}

/// The numbers behind one set of labels.
#[derive(Default)]
struct Series {
    state: Option<State>,
    attempts: u64,
    established: u64,
    in_flight: u64,
    abandoned: u64,
    throttled: u64,
    connections: u64,
    would_reject_outcomes: [u64; 2],
    timeouts: BTreeMap<&'static str, u64>,
    failures: BTreeMap<&'static str, u64>,
    rejected: BTreeMap<&'static str, u64>,
    would_reject: BTreeMap<&'static str, u64>,
    held: BTreeMap<&'static str, u64>,
    transitions: BTreeMap<(State, State, ReasonKind), u64>,
    retries: u64,
    live_retries: u64,
    non_idempotent: [u64; 3],
    operation_attempts: u64,
    budget_tokens: Option<u64>,
    operations: [u64; 5],
    connect: Cumulative,
    response: Cumulative,
}

/// Which of two states to show: the one that hurts more.
fn severity(state: State) -> u8 {
    match state {
        State::Closed => 0,
        State::ForcedClosed => 1,
        State::HalfOpen => 2,
        State::ForcedOpen => 3,
        State::Open => 4,
    }
}

fn add(sums: &mut BTreeMap<&'static str, u64>, counts: &[(&'static str, u64)], always: &[&str]) {
    for (word, count) in counts {
        if *count > 0 || always.contains(word) {
            let sum = sums.entry(word).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
}

/// Words that are always shown, and those of what is possible.
fn with(always: &[&'static str], rare: &[(bool, &'static str)]) -> Vec<&'static str> {
    let rare = rare.iter().filter(|(is_possible, _)| *is_possible);
    always
        .iter()
        .copied()
        .chain(rare.map(|(_, word)| *word))
        .collect()
}

impl Series {
    fn add(&mut self, row: &RowMetrics) {
        if self
            .state
            .is_none_or(|state| severity(state) < severity(row.state))
        {
            self.state = Some(row.state);
        }
        for (sum, count) in [
            (&mut self.attempts, row.attempts),
            (&mut self.established, row.established),
            (&mut self.in_flight, row.in_flight),
            (&mut self.abandoned, row.abandoned),
            (&mut self.throttled, row.throttled),
            (&mut self.retries, row.retries),
            (&mut self.live_retries, row.live_retries),
            (&mut self.operation_attempts, row.operation_attempts),
            (&mut self.connections, row.connections),
        ] {
            *sum = sum.saturating_add(count);
        }
        let outcomes = self.would_reject_outcomes.iter_mut();
        for (sum, count) in outcomes.zip(row.would_reject_outcomes) {
            *sum = sum.saturating_add(count);
        }
        for (sum, count) in self.non_idempotent.iter_mut().zip(row.non_idempotent) {
            *sum = sum.saturating_add(count);
        }
        let of = row.possible;
        let rare = [
            (of.hung, "hung"),
            (of.read || of.stall, "read_timeout"),
            (of.write, "write_timeout"),
            (of.deadline, "deadline"),
        ];
        let always = with(&OUTCOMES, &rare);
        add(&mut self.failures, &row.failures.each(), &always);
        let words = TIMEOUTS.map(TimeoutKind::as_str);
        let timeouts: Vec<_> = words.into_iter().zip(row.timeouts).collect();
        let rare = [
            (of.read, TimeoutKind::Read.as_str()),
            (of.write, TimeoutKind::Write.as_str()),
            (of.stall, TimeoutKind::Stall.as_str()),
            (of.deadline, TimeoutKind::Deadline.as_str()),
        ];
        let always = with(&[TimeoutKind::Connect.as_str()], &rare);
        add(&mut self.timeouts, &timeouts, &always);
        if let Some(tokens) = row.budget_tokens {
            *self.budget_tokens.get_or_insert(0) += tokens;
        }
        for (sum, count) in self.operations.iter_mut().zip(row.operations) {
            *sum = sum.saturating_add(count);
        }
        let rare = [(of.deadline, "deadline"), (of.limit, "limit")];
        let always = with(&["breaker", "retry_budget", "retry_limit"], &rare);
        add(&mut self.rejected, &row.rejected.each(), &always);
        add(&mut self.would_reject, &row.would_reject.each(), &always);
        let held = [("backoff", row.held.backoff), ("spin", row.held.spin)];
        add(&mut self.held, &held, &["backoff", "spin"]);
        for transition in &row.transitions {
            let key = (transition.from, transition.to, transition.reason);
            let sum = self.transitions.entry(key).or_default();
            *sum = sum.saturating_add(transition.count);
        }
        let of = &row.connect;
        let connect = cumulative(&CONNECT_BOUNDS, &of.buckets, of.count, of.sum_us);
        self.connect.add(&connect);
        let of = &row.response;
        let response = cumulative(&RESPONSE_BOUNDS, &of.buckets, of.count, of.sum_us);
        self.response.add(&response);
    }

    fn write(&self, page: &mut Page, row: [&str; 3]) {
        page.number(declared::ATTEMPTS, &row, &[], self.attempts);
        page.number(declared::ESTABLISHED, &row, &[], self.established);
        page.number(declared::IN_FLIGHT, &row, &[], self.in_flight);
        page.number(declared::ABANDONED, &row, &[], self.abandoned);
        page.number(declared::THROTTLED, &row, &[], self.throttled);
        page.number(declared::RETRIES, &row, &[], self.retries);
        page.number(declared::LIVE_RETRIES, &row, &[], self.live_retries);
        let results = ["passed", "refused", "would_refuse"];
        for (word, count) in results.into_iter().zip(self.non_idempotent) {
            page.number(declared::NON_IDEMPOTENT, &row, &[word], count);
        }
        if let Some(tokens) = self.budget_tokens {
            page.number(declared::RETRY_BUDGET, &row, &[], tokens);
        }
        page.operations(&row, &self.operations, self.operation_attempts);
        page.number(declared::CONNECTIONS, &row, &[], self.connections);
        // Of interest in observe mode only.
        if self.would_reject_outcomes != [0; 2] {
            for (word, count) in ["succeeded", "failed"]
                .into_iter()
                .zip(self.would_reject_outcomes)
            {
                page.number(declared::WOULD_REJECT_OUTCOMES, &row, &[word], count);
            }
        }
        for (metric, counts) in [
            (declared::TIMEOUTS, &self.timeouts),
            (declared::FAILURES, &self.failures),
            (declared::REJECTED, &self.rejected),
            (declared::WOULD_REJECT, &self.would_reject),
            (declared::HELD, &self.held),
        ] {
            for (word, count) in counts {
                page.number(metric, &row, &[word], *count);
            }
        }
        if let Some(now) = self.state {
            for state in State::ALL {
                let value = u64::from(*state == now);
                page.number(declared::BREAKER_STATE, &row, &[state.as_str()], value);
            }
        }
        for ((from, to, reason), count) in &self.transitions {
            let labels = [from.as_str(), to.as_str(), reason.as_str()];
            page.number(declared::TRANSITIONS, &row, &labels, *count);
        }
        page.histogram(declared::CONNECT_DURATION, &row, &self.connect);
        page.histogram(declared::RESPONSE_DURATION, &row, &self.response);
    }
}

/// Samples by metric, in the order of the declarations.
#[derive(Default)]
struct Page {
    samples: BTreeMap<&'static str, Vec<proto::Metric>>,
}

impl Page {
    fn sample(&mut self, metric: Metric, row: &[&str], labels: &[&str]) -> &mut proto::Metric {
        debug_assert_eq!(metric.per_row, row.len() == ROW_LABELS.len());
        debug_assert_eq!(metric.labels.len(), labels.len());
        let row_labels = ROW_LABELS.iter().zip(row);
        let pairs = row_labels
            .chain(metric.labels.iter().zip(labels))
            .map(|(name, value)| {
                let mut pair = LabelPair::default();
                pair.set_name((*name).to_owned());
                pair.set_value((*value).to_owned());
                pair
            })
            .collect();
        let samples = self.samples.entry(metric.name).or_default();
        let at = samples.len();
        samples.push(proto::Metric::from_label(pairs));
        &mut samples[at]
    }

    #[expect(clippy::cast_precision_loss, reason = "Prometheus numbers are f64")]
    fn number(&mut self, metric: Metric, row: &[&str], labels: &[&str], value: u64) {
        let sample = self.sample(metric, row, labels);
        match metric.kind {
            Kind::Counter => {
                let mut counter = proto::Counter::default();
                counter.set_value(value as f64);
                sample.set_counter(counter);
            }
            Kind::Gauge | Kind::Histogram => {
                let mut gauge = proto::Gauge::default();
                gauge.set_value(value as f64);
                sample.set_gauge(gauge);
            }
        }
    }

    fn histogram(&mut self, metric: Metric, row: &[&str], values: &Cumulative) {
        let buckets = values.buckets.iter().map(|(bound_us, count)| {
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(seconds(*bound_us));
            bucket.set_cumulative_count(*count);
            bucket
        });
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets.collect());
        histogram.set_sample_count(values.count);
        histogram.set_sample_sum(seconds(values.sum_us));
        self.sample(metric, row, &[]).set_histogram(histogram);
    }

    /// Operations by their attempts, the last entry of those with more.
    #[expect(clippy::cast_precision_loss, reason = "Prometheus numbers are f64")]
    fn operations(&mut self, row: &[&str], operations: &[u64; 5], attempts: u64) {
        let (mut below, mut bound) = (0, 0.0);
        let mut buckets = Vec::new();
        for count in operations {
            (below, bound) = (below + count, bound + 1.0);
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(bound);
            bucket.set_cumulative_count(below);
            buckets.push(bucket);
        }
        buckets.pop();
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(below);
        histogram.set_sample_sum(attempts as f64);
        self.sample(declared::OPERATION_ATTEMPTS, row, &[])
            .set_histogram(histogram);
    }

    fn text(mut self) -> Result<String, RenderError> {
        let families = declared::ALL.iter().filter_map(|metric| {
            let mut family = MetricFamily::default();
            family.set_name(metric.name.to_owned());
            family.set_help(metric.help.to_owned());
            family.set_field_type(match metric.kind {
                Kind::Counter => MetricType::COUNTER,
                Kind::Gauge => MetricType::GAUGE,
                Kind::Histogram => MetricType::HISTOGRAM,
            });
            // A metric without samples is left out.
            family.set_metric(self.samples.remove(metric.name)?);
            Some(family)
        });
        let families: Vec<_> = families.collect();
        Ok(TextEncoder::new().encode_to_string(&families)?)
    }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus numbers are f64")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
