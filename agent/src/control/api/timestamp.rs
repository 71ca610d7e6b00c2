//! Points in time as events and pauses show them.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// Milliseconds since 1970-01-01 UTC; in text RFC 3339 in UTC with milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

/// Last millisecond of the year 9999, the end of RFC 3339.
const END: u64 = 253_402_300_799_999;

impl Timestamp {
    /// The current time of the system clock.
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// From milliseconds since 1970-01-01 UTC; beyond the year 9999 it stays at its end.
    pub const fn from_unix_ms(ms: u64) -> Self {
        Self(if ms > END { END } else { ms })
    }

    /// Milliseconds since 1970-01-01 UTC.
    pub const fn unix_ms(self) -> u64 {
        self.0
    }

    /// Time from here until `later`; zero if it is not later.
    pub const fn until(self, later: Self) -> Duration {
        Duration::from_millis(later.0.saturating_sub(self.0))
    }

    /// `11-29 12:03:04.123`, UTC: for a person who knows the year.
    pub fn short(self) -> String {
        let text = self.to_string();
        format!("{} {}", &text[5..10], &text[11..23])
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self::from_unix_ms(u64::try_from(since.as_millis()).unwrap_or(END))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = i128::from(self.0) * 1_000_000;
        let at = OffsetDateTime::from_unix_timestamp_nanos(nanos).map_err(|_| fmt::Error)?;
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
            at.year(),
            u8::from(at.month()),
            at.day(),
            at.hour(),
            at.minute(),
            at.second(),
            at.millisecond(),
        )
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let at = OffsetDateTime::parse(&text, &Rfc3339).map_err(de::Error::custom)?;
        let ms = at.unix_timestamp_nanos() / 1_000_000;
        u64::try_from(ms)
            .map(Self::from_unix_ms)
            .map_err(|_| de::Error::custom("time before 1970"))
    }
}
