//! Decoding what the kernel puts into the ring buffer.

use agent_common::Event;

/// The event in a record, or `None` for a record of another size (an object of another version
/// is refused at load, so this is damage, which is counted and skipped).
pub fn decode(record: &[u8]) -> Option<Event> {
    // Records are 8-byte aligned in the ring, but this must hold for any slice.
    (record.len() == size_of::<Event>()).then(|| bytemuck::pod_read_unaligned(record))
}

/// A process name from the kernel as text: up to the first zero, control characters replaced.
pub fn comm(raw: &[u8]) -> String {
    let end = raw.iter().position(|b| *b == 0).unwrap_or(raw.len());
    String::from_utf8_lossy(&raw[..end])
        .chars()
        .map(printable)
        .collect()
}

/// The character, or `?` for one that does something to a terminal or to the order of a line
/// instead of being shown: control characters, and those that change direction or have no width.
pub fn printable(c: char) -> char {
    let invisible = matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
    );
    if c.is_control() || invisible { '?' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_record_is_decoded_or_refused(record: Vec<u8>) {
            prop_assert_eq!(decode(&record).is_some(), record.len() == size_of::<Event>());
        }

        #[test]
        fn a_name_is_printable(raw: [u8; 16]) {
            prop_assert!(comm(&raw).chars().all(|c| !c.is_control()));
        }
    }

    #[test]
    fn fields_are_where_the_kernel_writes_them() {
        let mut record = [0_u8; size_of::<Event>()];
        record[0] = 2;
        record[16..24].copy_from_slice(&77_u64.to_ne_bytes());
        record[64..68].copy_from_slice(b"curl");
        let event = decode(&record).unwrap();
        assert_eq!((event.kind, event.at_ns), (2, 77));
        assert_eq!(comm(&event.comm), "curl");
    }
}
