r"""tide: test-time inference under drift, by evidence. A method of this project.

One forward pass over each image and its mirror image, one update of the weights, and the prediction of that pass. Let
p_i be the mean probability of the two views of image i, C the number of classes and n the images of the batch.

1. **Stream statistics** (`methods/statistics.py`). Each BatchNorm normalizes with moving statistics of the stream. A
   **shift detector** (`shift_detector.py`) compares the mean description of the last images with that of the domain and
   gives the probability d that a new domain has begun; memories, Adam's among them, shrink by 1 - d, and half of what
   the weights learned goes with a domain: theta <- theta + d/2 (theta_source - theta).
2. **Source mixing** (`source_mixing.py`). Each BatchNorm uses the statistics of a mixture of stream and training data
   in the proportion a : 1 - a. With the channel means and mean squares t_i of image i in units of the source, their
   mean t over the n images of the stream and the mean squared distance V of the t_i to t,

       a  =  max(0, 1 - 4 V / (n - 1) / |t - t_source|^2).
3. **Domain clusters** (`domain_clusters.py`). Where the descriptions of the images vary more than those of one domain,
   k-means finds 8 clusters, and each BatchNorm keeps statistics for each of them.
4. **Class prior** (`class_prior.py`). With the mean prediction q of the stream, shrunk to even classes,
   and the mean prediction pi_i of the neighbors of image i in the stream,

       prediction_i  ~  p_i / q * pi_i^w,        w = e / (e + 0.05),

   where e is the autocorrelation of the predictions along the stream, less what chance gives: the division removes the
   bias of the network, the power follows labels that come in runs. pi is found by expectation maximization.
5. **Loss**. Minimum class confusion (Jin et al., ECCV 2020) with a memory, for u_i the softmax of the views' mean
   log-probabilities over a temperature of 2.5 and weights v_i ~ 1 + exp(-H(u_i)):

       M  =  sum_i v_i u_i u_i' + memory,        L  =  1 - 1/C sum_c M_cc / sum_k M_ck.

   Rows of frequent classes forget first; the memory lets single images learn. Or, with loss="information", the mutual
   information of images and classes, L = - 1/n sum_i KL(p_i || q).
6. **Step**. Adam gives a step s for the weights; with the expected error rate err of the domain,
   r = min(1, err / 0.12) and the images m of the domain seen so far,

       theta  <-  theta + s (1 - w) r (1 + 2^(-m/1024)) sqrt(n/128)
       theta  <-  theta + (1 - (1 - decay)^(n/128)) (theta_source - theta),     decay = source_decay (1 + 2 (1 - r)).

   The first factor shortens steps where labels are correlated, the second where few errors are expected; the third
   lengthens them where a domain is new.

All constants are in `constants.py`; `method.py` is the method.
"""
