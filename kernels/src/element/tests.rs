use super::*;
use crate::simd::LANES;
use crate::testing::Random;

fn elements(count: usize) -> Vec<Element> {
    let mut random = Random::new(count as u64);
    (0..count).map(|_| Element::from_f32(random.uniform())).collect()
}

#[test]
fn elements_are_loaded_and_stored_as_they_are() {
    let (from, mut to) = (elements(LANES + 1), vec![Element::default(); LANES + 1]);
    for count in 0..=LANES {
        to.fill(Element::from_f32(7.0));
        // SAFETY: both have more than 16 elements.
        let loaded = unsafe {
            let loaded = Element::load_first(from.as_ptr().add(1), count);
            Element::store_first(loaded, to.as_mut_ptr().add(1), count);
            loaded.to_array()
        };
        let expected: Vec<f32> =
            (0..LANES).map(|lane| if lane < count { from[lane + 1].to_f32() } else { 0.0 }).collect();
        assert_eq!(loaded[..], expected[..]);
        assert_eq!(to[1..=count], from[1..=count]);
        assert!(to[count + 1..].iter().all(|&element| element == Element::from_f32(7.0)));
    }
}

#[test]
fn rounding_is_that_of_memory() {
    let mut random = Random::new(3);
    let values: [f32; LANES] = std::array::from_fn(|_| random.uniform());
    // SAFETY: there are 16 numbers.
    let rounded = Element::round(unsafe { F32::load(values.as_ptr()) }).to_array();
    assert_eq!(rounded, values.map(|value| Element::from_f32(value).to_f32()));
}
