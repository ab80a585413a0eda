// What tensor cores do, by one lane after another: the layouts are those that mma.cuh of the kernels describes.
#pragma once
#include "common.cuh"

struct Left {
    unsigned part[4];
};

template <class T> inline float number(unsigned bits, int which) {
    const uint16_t half = uint16_t(which ? bits >> 16 : bits);
    T value;
    memcpy(&value, &half, 2);
    return to_float(value);
}

template <class T> inline void multiply_add(float (&sums)[4], const Left& a, unsigned b0, unsigned b1, T) {
    const unsigned own[6] = {a.part[0], a.part[1], a.part[2], a.part[3], b0, b1};
    const unsigned turn = emulator::show(nullptr, own, 6), g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        const unsigned row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned of_left = row % 8 * 4 + k % 8 / 2, of_right = column * 4 + k % 8 / 2;
            const unsigned left = emulator::shown(of_left).value[turn][row / 8 + k / 8 * 2];
            const unsigned right = emulator::shown(of_right).value[turn][4 + k / 8];
            sums[i] += number<T>(left, k % 2) * number<T>(right, k % 2);
        }
    }
}

template <bool TURNED> inline void load_matrices(unsigned (&to)[4], const void* row) {
    if ((size_t)row % 16) emulator::machine.error = "ldmatrix: a row that is not aligned";
    const unsigned turn = emulator::show(row, nullptr, 0), g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
        uint16_t two[2];
        for (unsigned i = 0; i < 2; ++i) {
            const unsigned down = TURNED ? 2 * t + i : g, across = TURNED ? g : 2 * t + i;
            const auto from = static_cast<const char*>(emulator::shown(matrix * 8 + down).address[turn]);
            memcpy(&two[i], from + 2 * across, 2);
        }
        to[matrix] = two[0] | unsigned(two[1]) << 16;
    }
    __syncwarp();  // nobody may write there before all have read
}

// Copies that arrive later arrive when they are waited for, and each fiber keeps those it asked for until then; or, in
// orders of an odd number, at once.
struct Copy {
    void* to;
    const void* from;
    bool there;

    void arrive() const {
        if (there)
            memcpy(to, from, 16);
        else
            memset(to, 0, 16);
    }
};
inline std::vector<std::vector<std::vector<Copy>>> copies;  // of each thread, groups

inline std::vector<std::vector<Copy>>& own_copies() {
    const unsigned number = emulator::machine.now->number;
    if (copies.size() <= number) copies.resize(number + 1);
    if (copies[number].empty()) copies[number].emplace_back();
    return copies[number];
}

inline void copy_later(void* to, const void* from, bool there) {
    if ((size_t)to % 16 || (size_t)from % 16) emulator::machine.error = "cp.async: an address that is not aligned";
    const Copy copy = {to, from, there};
    if (emulator::machine.order % 2)
        copy.arrive();
    else
        own_copies().back().push_back(copy);
}

inline void end_group() { own_copies().emplace_back(); }

template <int PENDING> inline void wait_for_groups() {
    auto& groups = own_copies();  // the last one is open
    while (groups.size() > PENDING + 1) {
        for (const Copy& copy : groups.front()) copy.arrive();
        groups.erase(groups.begin());
    }
}

template <class T> inline unsigned two(float first, float second) {
    const T held[2] = {from_float<T>(first), from_float<T>(second)};
    unsigned bits;
    memcpy(&bits, held, 4);
    return bits;
}
