//! Destinations, patterns, workloads and durations, as they come from the command line, from a
//! configuration and from requests to the control interface.
#![no_main]

use backstop::{
    control::api::{parse_destination, parse_for},
    policy::{Destination, DestinationArg, DestinationPattern, WorkloadPattern},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(destination) = text.parse::<Destination>() {
        let written = destination.to_string();
        assert_eq!(
            written.parse::<Destination>().ok(),
            Some(destination),
            "{written}"
        );
    }
    let _ = text.parse::<DestinationArg>();
    let _ = text.parse::<DestinationPattern>();
    let _ = text.parse::<WorkloadPattern>();
    let _ = parse_destination(text);
    let _ = parse_for(text);
});
