use super::*;
use crate::element::{Element, FLOAT8S};
use crate::testing::Random;

fn vector(lanes: [f32; LANES]) -> F32 {
    // SAFETY: there are 16 numbers.
    unsafe { F32::load(lanes.as_ptr()) }
}

fn integers(lanes: [i32; LANES]) -> I32 {
    // SAFETY: there are 16 numbers.
    unsafe { I32::load(lanes.as_ptr()) }
}

fn words(lanes: [u16; LANES]) -> U16 {
    // SAFETY: there are 16 words.
    unsafe { U16::load(lanes.as_ptr()) }
}

fn words_of(vector: U16) -> [u16; LANES] {
    let mut lanes = [0; LANES];
    // SAFETY: the array has 16 words.
    unsafe { vector.store(lanes.as_mut_ptr()) };
    lanes
}

fn uniform(random: &mut Random) -> [f32; LANES] {
    std::array::from_fn(|_| random.uniform())
}

fn lane(vector: F32) -> f32 {
    vector.to_array()[LANES - 1]
}

#[test]
fn lanes_are_computed_apart() {
    let mut random = Random::new(1);
    let (a, b, c) = (uniform(&mut random), uniform(&mut random), uniform(&mut random));
    let (x, y, z) = (vector(a), vector(b), vector(c));
    let of = |function: fn(f32, f32) -> f32| -> [f32; LANES] { std::array::from_fn(|lane| function(a[lane], b[lane])) };
    assert_eq!((x + y).to_array(), of(|a, b| a + b));
    assert_eq!((x - y).to_array(), of(|a, b| a - b));
    assert_eq!((x * y).to_array(), of(|a, b| a * b));
    assert_eq!((x / y).to_array(), of(|a, b| a / b));
    assert_eq!(x.max(y).to_array(), of(f32::max));
    assert_eq!(x.min(y).to_array(), of(f32::min));
    for (lane, sum) in x.mul_add(y, z).to_array().into_iter().enumerate() {
        assert!((sum - (a[lane] * b[lane] + c[lane])).abs() < 1e-6);
    }
    assert_eq!(x.greater(y).bits(), (0..LANES).fold(0, |bits, lane| bits | u16::from(a[lane] > b[lane]) << lane));
    assert_eq!(x.select(x.greater(y), y).to_array(), of(f32::max));
    assert_eq!(F32::from_bits(x.to_bits()).to_array(), a);
}

#[test]
fn integers_are_computed_apart() {
    let mut random = Random::new(2);
    let [a, b]: [[i32; LANES]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| random.next() as i32));
    let (x, y) = (integers(a), integers(b));
    let of = |function: fn(i32, i32) -> i32| -> [i32; LANES] { std::array::from_fn(|lane| function(a[lane], b[lane])) };
    assert_eq!((x + y).to_array(), of(i32::wrapping_add));
    assert_eq!((x - y).to_array(), of(i32::wrapping_sub));
    assert_eq!((x * y).to_array(), of(i32::wrapping_mul));
    assert_eq!((x & y).to_array(), of(|a, b| a & b));
    assert_eq!((x | y).to_array(), of(|a, b| a | b));
    assert_eq!(x.max(y).to_array(), of(i32::max));
    assert_eq!(x.min(y).to_array(), of(i32::min));
    assert_eq!(x.shift_left(5).to_array(), of(|a, _| a << 5));
    assert_eq!(x.shift_right(5).to_array(), of(|a, _| (a as u32 >> 5) as i32));
    assert_eq!(x.to_f32().to_array(), a.map(|a| a as f32));
    assert_eq!(x.equal(x.select(Mask::from_bits(0x0f12), y)).bits(), 0x0f12);
    assert_eq!(I32::lane_numbers().to_array(), std::array::from_fn(|lane| lane as i32));
}

#[test]
fn numbers_of_maxima_and_minima_that_are_nan_are_the_second() {
    let (nan, one) = (F32::splat(f32::NAN), F32::splat(1.0));
    assert_eq!([lane(nan.max(one)), lane(nan.min(one))], [1.0, 1.0]);
    assert!(lane(one.max(nan)).is_nan() && lane(one.min(nan)).is_nan());
}

#[test]
fn masks_choose_lanes() {
    for count in 0..=LANES + 3 {
        assert_eq!(Mask::first(count).bits(), if count >= LANES { 0xffff } else { (1 << count) - 1 });
    }
    for bits in [0, 1, 0x8001, 0x5a5a, 0xffff] {
        assert_eq!(Mask::from_bits(bits).bits(), bits);
        assert_eq!((Mask::from_bits(bits) & Mask::first(9)).bits(), bits & 0x1ff);
    }
}

#[test]
fn the_first_lanes_are_loaded_and_stored_alone() {
    let source: Vec<f32> = (1..=20).map(|x| x as f32).collect();
    for count in 0..=LANES {
        let mut target = [-1.0; LANES];
        // SAFETY: both have 16 numbers.
        let loaded = unsafe {
            let loaded = F32::load_first(source.as_ptr(), count);
            vector([5.0; LANES]).store_first(target.as_mut_ptr(), count);
            loaded
        };
        let expected: [f32; LANES] = std::array::from_fn(|lane| if lane < count { source[lane] } else { 0.0 });
        assert_eq!(loaded.to_array(), expected);
        assert_eq!(target, std::array::from_fn(|lane| if lane < count { 5.0 } else { -1.0 }));
    }
}

#[test]
fn reductions_see_every_lane() {
    for place in 0..LANES {
        let mut lanes = [-3.0; LANES];
        lanes[place] = 4.0;
        assert_eq!(vector(lanes).reduce_max(), 4.0);
        assert_eq!(vector(lanes).reduce_sum(), -41.0);
    }
}

#[test]
fn numbers_are_rounded_to_integers_that_are_even_for_ties() {
    let numbers = [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 1.4, -1.6];
    for number in numbers {
        assert_eq!(lane(F32::splat(number).round()), number.round_ties_even());
        assert_eq!(F32::splat(number).to_i32().to_array()[3], number.round_ties_even() as i32);
    }
}

#[test]
fn conversions_between_formats_are_those_of_scalars() {
    for high in 0..0x1000u16 {
        let patterns: [u16; LANES] = std::array::from_fn(|low| high << 4 | low as u16);
        let same = |actual: [f32; LANES], expected: [f32; LANES]| {
            for (actual, expected) in actual.into_iter().zip(expected) {
                assert!(actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan());
            }
        };
        same(F32::from_f16(words(patterns)).to_array(), patterns.map(from_f16));
        same(F32::from_bf16(words(patterns)).to_array(), patterns.map(from_bf16));
        for bits in patterns {
            let (half, brain) = (from_f16(bits), from_bf16(bits));
            assert!(half.is_nan() || to_f16(half) == bits);
            assert!(brain.is_nan() || to_bf16(brain) == bits);
        }
    }
    assert_eq!([from_f16(0x3c00), from_f16(0x0001), from_f16(0xfbff)], [1.0, 2f32.powi(-24), -65504.0]);
    assert_eq!(
        [65519.0, 65520.0, f32::INFINITY, 2f32.powi(-26), -0.0].map(to_f16),
        [0x7bff, 0x7c00, 0x7c00, 0, 0x8000]
    );
    assert!(from_f16(to_f16(f32::NAN)).is_nan() && from_bf16(to_bf16(f32::NAN)).is_nan());
}

#[test]
fn numbers_are_rounded_to_16_bits_like_scalars() {
    let mut random = Random::new(4);
    for _ in 0..5000 {
        // Numbers of the magnitudes of float16, ties among them.
        let lanes: [f32; LANES] = std::array::from_fn(|lane| {
            let bits = random.next();
            let kept = if lane % 2 == 0 { 0x1fff } else { 0xfff };
            let number = f32::from_bits((bits as u32 & 0x807f_ffff & !kept) | (100 + (bits >> 32) as u32 % 45) << 23);
            if lane % 4 == 0 { number + number * 2f32.powi(-11) } else { number }
        });
        assert_eq!(words_of(vector(lanes).to_f16()), lanes.map(to_f16));
        assert_eq!(words_of(vector(lanes).to_bf16()), lanes.map(to_bf16));
    }
    let nan = words_of(F32::splat(f32::NAN).to_bf16())[0];
    assert!(from_bf16(nan).is_nan() && from_f16(words_of(F32::splat(f32::NAN).to_f16())[0]).is_nan());
}

#[test]
fn products_of_codes_and_bytes_are_exact() {
    const COUNT: usize = 9;
    let mut random = Random::new(5);
    for greatest in [3, 7, 15, 31, 63, 255] {
        for case in 0..40 {
            let mut bytes = |extreme: [u8; 3]| -> [u8; 4] {
                std::array::from_fn(|_| if case < 6 { extreme[case % 3] } else { random.next() as u8 })
            };
            // The greatest codes with the greatest inputs of each sign, or any.
            let inputs: [_; COUNT] = std::array::from_fn(|_| bytes([0x80, 0x7f, 0x81]));
            let codes: [[[u8; 4]; LANES]; COUNT] =
                std::array::from_fn(|_| std::array::from_fn(|_| bytes([greatest; 3]).map(|code| code & greatest)));
            let expected = |lane: usize| {
                let pairs = codes.iter().zip(&inputs).flat_map(|(codes, inputs)| codes[lane].into_iter().zip(inputs));
                3 + pairs.map(|(code, &input)| i32::from(code) * i32::from(input.cast_signed())).sum::<i32>()
            };
            let codes = codes.map(|lanes| integers(lanes.map(i32::from_le_bytes)));
            // SAFETY: there is an input for each vector of codes.
            let sums = unsafe { I32::splat(3).dot_codes(&codes, inputs.as_ptr().cast(), greatest.into()) };
            assert_eq!(sums.to_array(), std::array::from_fn(expected), "codes up to {greatest}, case {case}");
            if inputs.as_flattened().contains(&0x80) {
                continue;
            }
            let sum = inputs.as_flattened().iter().map(|input| i32::from(input.cast_signed())).sum::<i32>();
            let start = I32::splat(3 + Bytes::OFFSET * sum);
            // SAFETY: as above.
            let sums = unsafe { Bytes::dot(&codes.map(Bytes::of), inputs.as_ptr().cast(), start) };
            assert_eq!(sums.to_array(), std::array::from_fn(expected), "bytes up to {greatest}, case {case}");
        }
    }
}

#[test]
fn powers_of_two_are_exact_to_some_bits_everywhere() {
    for step in -16_500..13_500 {
        let x = step as f32 * 0.01;
        let (fine, coarse) = (f64::from(lane(F32::splat(x).exp2())), f64::from(lane(F32::splat(x).exp2_coarse())));
        let expected = f64::from(x).exp2();
        let least = f64::from(f32::MIN_POSITIVE);
        assert!(
            (fine - expected).abs() <= 3e-7 * expected.max(least) || x >= 128.0 && fine == f64::INFINITY,
            "{x}: {fine}"
        );
        assert!((coarse - expected).abs() <= 6e-6 * expected.max(least) || x >= 127.99, "{x}: {coarse}");
    }
    assert_eq!(
        [0.0, 1.0, -151.0, -1e30, f32::NEG_INFINITY].map(|x| lane(F32::splat(x).exp2())),
        [1.0, 2.0, 0.0, 0.0, 0.0]
    );
    assert_eq!(lane(F32::splat(1e30).exp2()), f32::INFINITY);
    assert!(lane(F32::splat(f32::NAN).exp2()).is_nan());
}

#[test]
fn softplus_is_exact_to_some_bits_everywhere() {
    let softplus_of = |x: f32| lane(F32::splat(x).softplus());
    for step in -8000..8000 {
        let x = step as f32 * 0.01;
        let expected = f64::from(x).exp().ln_1p();
        assert!((f64::from(softplus_of(x)) / expected - 1.0).abs() < 8e-6, "{x}: {}", softplus_of(x));
        assert!((f64::from(softplus_of(x)) - expected).abs() < 3e-7 * expected.max(1.0), "{x}: {}", softplus_of(x));
    }
    assert_eq!([f32::NEG_INFINITY, f32::MIN, f32::MAX].map(softplus_of), [0.0, 0.0, f32::MAX]);
}

#[test]
fn tanh_is_exact_to_some_bits_everywhere() {
    let tanh_of = |x: f32| lane(F32::splat(x).tanh());
    for step in -20_000..20_000 {
        let x = step as f32 * 1e-3;
        assert!((f64::from(tanh_of(x)) - f64::from(x).tanh()).abs() < 3e-7, "{x}: {}", tanh_of(x));
    }
    assert_eq!([f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0].map(tanh_of), [1.0, -1.0, 1.0, -1.0, 0.0]);
    assert!(tanh_of(f32::NAN).is_nan());
}

#[test]
fn squares_are_transposed() {
    let number = |row: usize, lane: usize| (row * LANES + lane) as i32;
    let row = |row: usize| integers(std::array::from_fn(|lane| number(row, lane)));
    for (column, lanes) in I32::transpose(std::array::from_fn(row)).into_iter().enumerate() {
        assert_eq!(lanes.to_array(), std::array::from_fn(|lane| number(lane, column)));
    }
    for (column, lanes) in I32::transpose_pairs(std::array::from_fn(row)).into_iter().enumerate() {
        assert_eq!(lanes.to_array(), std::array::from_fn(|lane| number(lane / 2, column * 2 + lane % 2)));
    }
}

#[test]
fn inner_words_change_places() {
    let pairs = std::array::from_fn(|lane| if lane % 2 == 0 { 0x2222_1111 } else { 0x4444_3333 });
    let swapped = std::array::from_fn(|lane| if lane % 2 == 0 { 0x3333_1111 } else { 0x4444_2222 });
    assert_eq!(integers(pairs).swap_inner_words().to_array(), swapped);
}

#[test]
fn words_are_stored_between_others() {
    let mut places = [7; 2 * LANES];
    // SAFETY: there are 16 places from the second on, with another word between each two.
    unsafe { words(std::array::from_fn(|lane| 100 + lane as u16)).store_apart(places.as_mut_ptr().add(1)) };
    assert_eq!(places, std::array::from_fn(|place| if place % 2 == 0 { 7 } else { 100 + place as u16 / 2 }));
}

#[test]
fn bytes_are_widened_narrowed_and_chosen() {
    let bytes: [i8; LANES] = std::array::from_fn(|lane| (lane as i8).wrapping_mul(37));
    // SAFETY: the arrays have 16 bytes.
    let wide = unsafe { I32::load_bytes(bytes.as_ptr()) };
    assert_eq!(wide.to_array(), bytes.map(i32::from));
    assert_eq!(wide.reduce_max(), wide.to_array().into_iter().max().unwrap());
    assert_eq!(wide.reduce_sum(), wide.to_array().into_iter().sum::<i32>());
    let mut narrow = [0; LANES];
    // SAFETY: as above.
    unsafe { (wide + I32::splat(0x700)).store_bytes(narrow.as_mut_ptr()) };
    assert_eq!(narrow, bytes.map(|byte| byte as u8));
    let all = |vector: I32| vector.to_array().map(i32::to_le_bytes).concat();
    let bits = 0x8001_f00f_1234_5679_u64;
    let expected: Vec<u8> = (0..64).map(|bit| if bits >> bit & 1 == 1 { 0xff } else { 0 }).collect();
    assert_eq!(all(I32::bytes_where(bits)), expected);
    let table = std::array::from_fn(|index| 250 - 3 * index as u8);
    let codes = I32::lane_numbers() * I32::splat(0x0101_0101);
    let expected: Vec<u8> = (0..64).map(|byte| table[byte / 4]).collect();
    assert_eq!(all(codes.look_up(&table)), expected);
}

#[test]
fn numbers_of_8_bits_are_widened_exactly() {
    for (format, fraction_bits, bias, num_finite) in [(Float8::E4m3fn, 3, 7, 0x7f), (Float8::E5m2, 2, 15, 0x7c)] {
        for code in 0..num_finite {
            let (exponent, fraction) = (code >> fraction_bits, code & ((1 << fraction_bits) - 1));
            let (whole, exponent) = if exponent == 0 { (0, 1) } else { (1 << fraction_bits, exponent) };
            let expected = (whole + fraction) as f32 * f32::powi(2.0, exponent - bias - fraction_bits);
            let expected = [expected, -expected].map(|number| (number * format.shrinkage()).to_bits());
            for (byte, expected) in [code, code | 0x80].into_iter().zip(expected) {
                // Other bytes do not count.
                let of = |place: i32| I32::splat((byte << (8 * place)) | (0x5aa5_5aa5 & !(0xff << (8 * place))));
                let found = [
                    F32::from_float8::<0>(of(0), format),
                    F32::from_float8::<1>(of(1), format),
                    F32::from_float8::<2>(of(2), format),
                    F32::from_float8::<3>(of(3), format),
                ];
                assert_eq!(found.map(|numbers| lane(numbers).to_bits()), [expected; 4], "{byte:#x}");
            }
        }
    }
}

/// Both formats, and each one's bytes in ascending order of the positive numbers that they stand for.
fn eight_bit_floats() -> [(Float8, Vec<f32>); 2] {
    let number = |byte: i32, mantissa_bits: i32, bias: i32| {
        let (exponent, mantissa) = (byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1));
        let one = 1 << mantissa_bits;
        let (significand, power) = if exponent == 0 { (mantissa, 1) } else { (one + mantissa, exponent) };
        significand as f32 * 2f32.powi(power - bias - mantissa_bits)
    };
    [
        (Float8::E4m3fn, (0..0x7f).map(|byte| number(byte, 3, 7)).collect()),
        (Float8::E5m2, (0..0x7c).map(|byte| number(byte, 2, 15)).collect()),
    ]
}

fn stored(format: Float8, value: f32) -> u8 {
    let mut bytes = [0; LANES];
    // SAFETY: the array has 16 bytes.
    unsafe { format.store(F32::splat(value), bytes.as_mut_ptr()) };
    bytes[LANES - 1]
}

#[test]
fn eight_bit_floats_are_read_exactly() {
    for (format, numbers) in eight_bit_floats() {
        // SAFETY: the array has 16 bytes.
        let loaded = |byte: u8| lane(unsafe { format.load([byte; LANES].as_ptr()) });
        for (byte, &number) in numbers.iter().enumerate() {
            assert_eq!(loaded(byte as u8).to_bits(), number.to_bits(), "{format:?} {byte}");
            assert_eq!(loaded(byte as u8 | 0x80).to_bits(), (-number).to_bits(), "{format:?} -{byte}");
            assert_eq!(Element::from_f32(number).to_f32(), number, "an element can be this number");
        }
        assert!(loaded(0x7f).is_nan() && loaded(0xff).is_nan());
    }
}

#[test]
fn every_eight_bit_float_becomes_the_same_element_by_tables() {
    for format in [Float8::E4m3fn, Float8::E5m2] {
        let codes: [u8; 256] = std::array::from_fn(|code| code as u8);
        let mut elements = [Element::default(); 256];
        for first in (0..256).step_by(FLOAT8S) {
            // SAFETY: both arrays have 256 places.
            unsafe { Element::store_float8(format, codes[first..].as_ptr(), elements[first..].as_mut_ptr()) };
        }
        for (code, element) in codes.into_iter().zip(elements) {
            // SAFETY: the array has 16 bytes.
            let number = lane(unsafe { format.load([code; LANES].as_ptr()) });
            let expected = Element::from_f32(number).to_f32(); // codes that are not stored may be too great for float16
            let (found, is_same) = (element.to_f32(), element.to_f32().to_bits() == expected.to_bits());
            assert!(is_same || found.is_nan() && expected.is_nan(), "{format:?} {code:#x}: {found}, not {expected}");
        }
    }
}

#[test]
fn numbers_are_stored_as_the_nearest_of_eight_bits() {
    for (format, numbers) in eight_bit_floats() {
        let below = |value: f32| f32::from_bits(value.to_bits() - 1);
        let above = |value: f32| f32::from_bits(value.to_bits() + 1);
        for (byte, pair) in numbers.windows(2).enumerate() {
            let (byte, middle) = (byte as u8, (pair[0] + pair[1]) / 2.0);
            let even = byte + byte % 2;
            let cases = [
                (pair[0], byte),
                (pair[1], byte + 1),
                (middle, even),
                (below(middle), byte),
                (above(middle), byte + 1),
            ];
            for (value, expected) in cases {
                assert_eq!(stored(format, value), expected, "{format:?} {value}");
                assert_eq!(stored(format, -value), expected | 0x80, "{format:?} -{value}");
            }
        }
        let largest = numbers.len() as u8 - 1;
        for value in [above(numbers[largest as usize]), f32::MAX, f32::INFINITY] {
            assert_eq!([stored(format, value), stored(format, -value)], [largest, largest | 0x80]);
        }
        assert_eq!(stored(format, f32::MIN_POSITIVE / 2.0), 0);
        assert_eq!([stored(format, f32::NAN), stored(format, -f32::NAN)], [0x7f, 0xff]);
    }
}
