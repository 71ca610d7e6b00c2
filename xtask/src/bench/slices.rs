//! Short slices in turn, and medians of the ratios within a round.

use anyhow::Result;

/// Gives each of `subjects` one slice a round, beginning with another one each time, so that none
/// always comes first or after the same neighbour. Returns each subject's measurements by round.
///
/// # Errors
/// The first error of a slice.
pub fn interleave(
    rounds: usize,
    subjects: usize,
    mut slice: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<Vec<f64>>> {
    let mut measured = vec![Vec::with_capacity(rounds); subjects];
    for round in 0..rounds {
        for turn in 0..subjects {
            // Forwards and backwards in turn, from a start that moves on.
            let step = if round % 2 == 0 {
                turn
            } else {
                subjects - 1 - turn
            };
            let subject = (round / 2 + step) % subjects;
            measured[subject].push(slice(subject)?);
        }
    }
    Ok(measured)
}

/// Median of `numerator[i] / denominator[i]`.
pub fn ratio(numerator: &[f64], denominator: &[f64]) -> f64 {
    median(&ratios(numerator, denominator))
}

/// Where the true median of the ratios lies with 95 % confidence if rounds are independent of each
/// other, whatever their distribution: between the values 1.96 / 2 square roots of their number
/// below and above the middle.
pub fn interval(numerator: &[f64], denominator: &[f64]) -> (f64, f64) {
    let mut sorted = ratios(numerator, denominator);
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() as f64 / 2.0;
    let reach = 1.96 / 2.0 * (sorted.len() as f64).sqrt();
    let at = |rank: f64| sorted.get(rank.max(0.0) as usize).or(sorted.last());
    let value = |rank: f64| at(rank).copied().unwrap_or(f64::NAN);
    (
        value((middle - reach).floor()),
        value((middle + reach).ceil()),
    )
}

fn ratios(numerator: &[f64], denominator: &[f64]) -> Vec<f64> {
    let pairs = numerator.iter().zip(denominator);
    pairs.map(|(n, d)| n / d).collect()
}

/// The middle one, or the mean of the two in the middle; NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middle() {
        assert!(median(&[]).is_nan());
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(ratio(&[2.0, 9.0, 4.0], &[1.0, 3.0, 2.0]), 2.0);
    }

    #[test]
    fn interval_encloses_the_median() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(interval(&values, &[1.0; 100]), (41.0, 61.0));
        assert_eq!(interval(&[3.0], &[2.0]), (1.5, 1.5));
    }

    #[test]
    fn every_subject_gets_each_place_alike() {
        let mut order = Vec::new();
        let measured = interleave(12, 3, |subject| {
            order.push(subject);
            Ok(order.len() as f64)
        })
        .unwrap();
        assert!(measured.iter().flatten().all(|value| *value > 0.0));
        for place in 0..3 {
            for subject in 0..3 {
                let there = order
                    .iter()
                    .skip(place)
                    .step_by(3)
                    .filter(|s| **s == subject);
                assert_eq!(there.count(), 4, "subject {subject} at place {place}");
            }
        }
    }
}
